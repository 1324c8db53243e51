"""The sources of `data.sources`, by type: of documents, and of examples to tune on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rostra.config.base import Section


class TextSource(Section):
    """Text files: one document a file."""

    type: Literal["text"]
    path: str = Field(description="a file, a folder (all .txt and .md below it), or a glob")
    encoding: str = "utf-8"


class GutenbergSource(Section):
    """A Project Gutenberg dump: .txt and .zip, one document a book, licence text removed."""

    type: Literal["gutenberg"]
    path: str = Field(description="the folder of the dump, or one book")


class JsonlSource(Section):
    """JSON lines: one document a line."""

    type: Literal["jsonl"]
    path: str = Field(description="a file, a folder (all .jsonl below it), or a glob")
    field: str = Field("text", description="the key that holds the text")


class PythonDocsSource(Section):
    """The standard library of the running Python: documentation topics and sources."""

    type: Literal["python_docs"]


class RecordsSource(Section):
    """Records: of JSON, JSON lines, Parquet or CSV files, a folder of the datasets library, or
    a dataset of the hub."""

    path: str = Field(description="a file, a folder, a glob, or a hub id")
    format: Literal["auto", "json", "jsonl", "parquet", "csv", "dataset"] = Field(
        "auto", description="of the files; by their endings when not given"
    )
    subset: str | None = Field(None, description="of a dataset: its configuration's name")
    split: str = Field("train", description="of a dataset")


class AlpacaSource(RecordsSource):
    """`instruction`, `input` (may be empty or missing) and `output`, in Alpaca's prompt."""

    type: Literal["alpaca"]


class ChatSource(RecordsSource):
    """Conversations, under a chat template: `messages` of `role` and `content`, or ShareGPT's
    `conversations` of `from` and `value`; tools and tool calls as transformers has them."""

    type: Literal["chat"]
    messages: str | None = Field(
        None, description="key of the list; `messages` or `conversations` when not given"
    )
    role: str | None = Field(None, description="key of a message's role; `role` or `from`")
    content: str | None = Field(None, description="key of its text; `content` or `value`")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        {}, description="what other names of roles stand for, beside the known ones"
    )
    train_roles: tuple[str, ...] = Field(("assistant",), description="whose turns are targets")
    train_turns: Literal["all", "last"] = Field("all", description="which of these turns")


class CompletionSource(RecordsSource):
    """Texts of which every token is a target."""

    type: Literal["completion"]
    field: str = Field("text", description="the key that holds the text")


class InputOutputSource(RecordsSource):
    """`segments` of `text` and `label`: exactly these texts, those labelled true trained."""

    type: Literal["input_output"]


class SquadSource(RecordsSource):
    """SQuAD's nested JSON (`data`, `paragraphs`, `qas`), or its flat records (`context`,
    `question`, `answers`), as a prompt to answer from the context."""

    type: Literal["squad"]
    system_prompt: str = ""


class MappingSource(RecordsSource):
    """Records of one's own: their keys, and how a prompt is made of them.

    `format` and `no_input_format` may name {system}, {instruction} and {input}.
    """

    type: Literal["mapping"]
    field_system: str = "system"
    field_instruction: str = "instruction"
    field_input: str = "input"
    field_output: str = "output"
    prompt: str = Field("{instruction} {input} ", description="with an input")
    prompt_without_input: str = Field("{instruction} ", description="without one")
    system_prompt: str = Field("", description="where a record has no system text")
    system_format: str = "{system}"


class PreferenceSource(RecordsSource):
    """Pairs of `chosen` and `rejected` answers, or answers with a thumb up or down in `label`:
    read, checked and shown by `rostra inspect`; not trained on yet."""

    type: Literal["preference"]


class TokenizedSource(RecordsSource):
    """`input_ids` and, if not all are targets, `labels` (-100 is none), made with the tokenizer
    of the config."""

    type: Literal["tokenized"]


DocumentSource = TextSource | GutenbergSource | JsonlSource | PythonDocsSource
ExampleSource = (
    AlpacaSource
    | ChatSource
    | CompletionSource
    | InputOutputSource
    | SquadSource
    | MappingSource
    | PreferenceSource
    | TokenizedSource
)
Source = Annotated[DocumentSource | ExampleSource, Field(discriminator="type")]
