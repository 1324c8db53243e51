"""The sources of `data.sources`, by type: of documents, and of examples to tune on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rostra.config.base import Section


class SourceSection(Section):
    """What every source may have, beside what its type has: a name, its share of the samples."""

    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="in messages, metrics and ids; `type:index` when not given"
    )

    weight: Annotated[float, Field(ge=0)] | None = Field(
        None, description="share of the samples, relative to the other sources'; all or none"
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="with weights: how often it is seen at the most, then the others go on"
    )


class TextSource(SourceSection):
    """Text files: one document a file."""

    type: Literal["text"]
    path: str = Field(description="a file, a folder (all .txt and .md below it), or a glob")
    encoding: str = "utf-8"


class GutenbergSource(SourceSection):
    """A Project Gutenberg dump: .txt and .zip, one document a book, licence text removed."""

    type: Literal["gutenberg"]
    path: str = Field(description="the folder of the dump, or one book")


class FieldsSource(SourceSection):
    """Documents that are records: the text under one key, the rest is metadata."""

    field: str = Field("text", description="the key that holds the text")
    id_field: str | None = Field(
        None, description="the key of a document's id; file and place when not given"
    )


class JsonlSource(FieldsSource):
    """JSON lines, plain, gzip or zstd: one document a line."""

    type: Literal["jsonl"]
    path: str = Field(description="a file, a folder (all .jsonl and the like below it), or a glob")


class ParquetSource(FieldsSource):
    """Parquet: one document a row; only the columns that are named are read."""

    type: Literal["parquet"]
    path: str = Field(description="a file, a folder (all .parquet below it), or a glob")
    metadata: tuple[str, ...] = Field((), description="columns that are kept as metadata")


class CsvSource(FieldsSource):
    """CSV with a header, plain, gzip or zstd: one document a row."""

    type: Literal["csv"]
    path: str = Field(description="a file, a folder (all .csv and .tsv below it), or a glob")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        ",", description="between the columns"
    )


class DatasetSource(FieldsSource):
    """A dataset of the datasets library: a folder that it saved, or one of the hub, streamed."""

    type: Literal["dataset"]
    path: str = Field(description="a folder of save_to_disk, or a hub id")
    subset: str | None = Field(None, description="its configuration's name")
    split: str = Field("train", description="which split of it")


class WebDatasetSource(FieldsSource):
    """WebDataset: tar files, plain, gzip or zstd; one document a key, from .txt or .json."""

    type: Literal["webdataset"]
    path: str = Field(description="a file, a folder (all .tar and the like below it), or a glob")


class TfrecordSource(FieldsSource):
    """TFRecord files of tf.train.Example, plain, gzip or zstd: one document a record."""

    type: Literal["tfrecord"]
    path: str = Field(description="a file, a folder (all .tfrecord below it), or a glob")


class PythonDocsSource(SourceSection):
    """The standard library of the running Python: documentation topics and sources."""

    type: Literal["python_docs"]


class TokensSource(SourceSection):
    """Documents of token ids, made with the tokenizer of the config."""

    type: Literal["tokens"]
    path: str = Field(description="a file, a folder, or a glob; for megatron also a prefix")
    format: Literal["arrow", "parquet", "webdataset", "megatron", "mds"]
    field: str = Field("tokens", description="the column or tar member that holds the ids")
    dtype: (
        Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] | None
    ) = Field(None, description="of ids that are plain bytes, as MDS and WebDataset may have them")


class RecordsSource(SourceSection):
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
    train_ends: Literal["turn", "all", "last"] = Field(
        "turn",
        description="which marks of a turn's end are targets: those of trained turns, of all "
        "turns, or the last one's",
    )
    message_weight: str | None = Field(
        None,
        description="key of a message's own loss weight, a number, or true or false; "
        "`loss_weight`, `weight` or `train` when not given",
    )


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
    """`input_ids` and, if not all are targets, `labels` (-100 is none), or `tokens` and
    `weights` as `rostra prepare --as parquet` writes them; made with the config's tokenizer."""

    type: Literal["tokenized"]


DocumentSource = (
    TextSource
    | GutenbergSource
    | JsonlSource
    | ParquetSource
    | CsvSource
    | DatasetSource
    | WebDatasetSource
    | TfrecordSource
    | PythonDocsSource
    | TokensSource
)
PromptSource = AlpacaSource | ChatSource | MappingSource | SquadSource  # apart from answers
ExampleSource = (
    PromptSource | CompletionSource | InputOutputSource | PreferenceSource | TokenizedSource
)
Source = Annotated[DocumentSource | ExampleSource, Field(discriminator="type")]
