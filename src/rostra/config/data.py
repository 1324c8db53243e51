"""The section `data`: where documents come from and how they become samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rostra.config.base import Count, Fraction, Section
from rostra.config.cleaning import CleanTable
from rostra.config.duplicates import DuplicatesTable
from rostra.config.loading import LoadTable
from rostra.config.preparing import PrepareTable
from rostra.config.sources import ExampleSource, Source


class TokenizerTable(Section):
    """Which tokenizer: the model's own, one from a folder or hub id, or one trained here."""

    pretrained: str | None = Field(None, description="a local folder or a hub id")
    vocabulary: Count | None = Field(None, description="train byte-level BPE of this many tokens")
    special: dict[Literal["bos_token", "eos_token", "pad_token", "unk_token"], str] = Field(
        {}, description="what these are; a token that is not there yet is added"
    )
    added: tuple[str, ...] = Field((), description="tokens that are added to the vocabulary")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.pretrained is not None and self.vocabulary is not None:
            raise ValueError("give `pretrained` to load a tokenizer or `vocabulary` to train one")
        if self.vocabulary is not None and self.vocabulary < 257:
            raise ValueError(
                "a byte-level vocabulary needs at least 257 tokens (256 bytes and one end mark)"
            )
        return self


class DataSection(Section):
    """Where documents come from and how they become samples."""

    sources: tuple[Source, ...] = Field(min_length=1)
    tokenizer: TokenizerTable = TokenizerTable()
    sequence_length: Count = 512
    isolate_documents: bool = Field(True, description="attention never crosses a document's end")
    packing: Literal["auto", "concatenate", "best_fit", "none"] = Field(
        "auto",
        description="how samples are filled: documents run on (concatenate), whole examples are "
        "fitted in (best_fit), or one example a sample (none); auto is best_fit for examples, "
        "concatenate for documents",
    )
    group_by_length: bool = Field(
        False, description="packing none: examples of about one length make a step"
    )
    long_examples: Literal["drop", "truncate", "split", "fail"] = Field(
        "drop", description="examples longer than sequence_length"
    )
    chat_template: str | None = Field(
        None, description="a known name or a Jinja file; the tokenizer's own when not given"
    )
    train_on_inputs: bool = Field(False, description="prompts are targets too")
    held_out: Fraction = Field(0.05, description="share of documents kept for evaluation, by hash")
    on_bad_record: Literal["fail", "skip"] = "fail"
    cache: str | None = Field(None, description="folder of shards; ~/.cache/rostra when not given")
    clean: CleanTable = CleanTable()
    duplicates: DuplicatesTable = DuplicatesTable()
    prepare: PrepareTable = PrepareTable()
    load: LoadTable = LoadTable()

    @property
    def examples(self) -> bool:
        """Whether samples are made of examples, with targets of their own, or of documents."""
        return any(isinstance(source, ExampleSource) for source in self.sources)

    @property
    def packed(self) -> Literal["concatenate", "best_fit", "none"]:
        """`packing`, decided."""
        if self.packing == "auto":
            return "best_fit" if self.examples else "concatenate"
        return self.packing

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.packing == "concatenate" and self.examples:
            raise ValueError("examples do not run on; set `packing: best_fit` or `none`")
        if self.packing in ("best_fit", "none") and not self.examples:
            raise ValueError(f"`packing: {self.packing}` is for examples; documents run on")
        if self.packed == "best_fit" and not self.isolate_documents:
            raise ValueError(
                "`packing: best_fit` keeps examples apart; leave `isolate_documents` true, or set "
                "`packing: none`"
            )
        if self.group_by_length and self.packed != "none":
            raise ValueError("`group_by_length` is for examples with `packing: none`")
        return self
