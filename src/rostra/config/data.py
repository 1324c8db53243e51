"""The section `data`: where documents come from and how they become samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rostra.config.augmenting import AugmentTable
from rostra.config.base import Count, Fraction, Section
from rostra.config.cleaning import CleanTable
from rostra.config.duplicates import DuplicatesTable
from rostra.config.loading import LoadTable
from rostra.config.preparing import PrepareTable
from rostra.config.sources import ExampleSource, PromptSource, Source


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
    packing: Literal["auto", "concatenate", "best_fit", "chunk", "none"] = Field(
        "auto",
        description="how samples are filled: documents run on (concatenate); whole documents or "
        "examples are fitted in (best_fit); each document is cut into windows (chunk); one "
        "example a sample (none); auto is best_fit for examples, concatenate for documents",
    )
    chunk_overlap: Count = Field(
        1,
        description="packing chunk: tokens that a window repeats of the one before; they are "
        "context there, no targets",
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
    streaming: bool = Field(
        False,
        description="train straight from the sources, tokenized on the way, without preparing them",
    )
    clean: CleanTable = CleanTable()
    duplicates: DuplicatesTable = DuplicatesTable()
    augment: AugmentTable = AugmentTable()
    prepare: PrepareTable = PrepareTable()
    load: LoadTable = LoadTable()

    @property
    def examples(self) -> bool:
        """Whether samples are made of examples, with targets of their own, or of documents."""
        return any(isinstance(source, ExampleSource) for source in self.sources)

    @property
    def packed(self) -> Literal["concatenate", "best_fit", "chunk", "none"]:
        """`packing`, decided."""
        if self.packing == "auto":
            return "best_fit" if self.examples else "concatenate"
        return self.packing

    @property
    def weighted(self) -> bool:
        """Whether samples are a mixture of the sources by weight."""
        return self.sources[0].weight is not None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [source.name or f"{source.type}:{k}" for k, source in enumerate(self.sources)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources have the name {twice[0]!r}; each needs one of its own")
        return self

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.packing in ("concatenate", "chunk") and self.examples:
            raise ValueError("examples do not run on; set `packing: best_fit` or `none`")
        if self.packing == "none" and not self.examples:
            raise ValueError(
                "`packing: none` is for examples; set `concatenate`, `best_fit` or `chunk`"
            )
        if self.packed == "best_fit" and not self.isolate_documents:
            raise ValueError(
                "`packing: best_fit` keeps documents and examples apart; leave "
                "`isolate_documents` true, or set another packing"
            )
        if self.group_by_length and self.packed != "none":
            raise ValueError("`group_by_length` is for examples with `packing: none`")
        if self.augment.variants > 1 and not any(isinstance(s, PromptSource) for s in self.sources):
            raise ValueError(
                "`augment.variants` are of prompts (sources of type alpaca, chat, mapping and "
                "squad), and no source has any; leave it 1"
            )
        return self

    @model_validator(mode="after")
    def _cleans(self) -> Self:
        if self.duplicates.find != "none" and self.examples:
            raise ValueError(
                "`duplicates.find` is for documents, and there are examples among the sources; "
                "set it to none (`duplicates.evaluation` does look into examples)"
            )
        if self.clean != CleanTable() and all(isinstance(s, ExampleSource) for s in self.sources):
            raise ValueError(
                "`clean` is for documents, and all sources are of examples; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if not self.streaming:
            return self
        refused = {
            "has no place for examples yet; leave it false": self.examples,
            "cannot find duplicates, as not all documents are known; set `duplicates.find: none`, "
            "or leave `streaming` false": self.duplicates.find != "none",
            "lets documents run on; set `packing: concatenate`": self.packed != "concatenate",
            "has its own order; leave `load.shuffle` global": self.load.shuffle != "global",
            "makes its batches in a thread; set `load.workers: 0`": self.load.workers > 0,
            "does not know how long an epoch is; leave out `epochs` of sources": any(
                source.epochs is not None for source in self.sources
            ),
        }
        for why, found in refused.items():
            if found:
                raise ValueError(f"`streaming` {why}")
        return self

    @model_validator(mode="after")
    def _chunks(self) -> Self:
        if self.chunk_overlap > 1 and self.packing != "chunk":
            raise ValueError("`chunk_overlap` is for `packing: chunk`")
        if self.packing == "chunk" and self.chunk_overlap >= self.sequence_length:
            raise ValueError(
                f"chunk_overlap ({self.chunk_overlap}) leaves nothing new in a window of "
                f"sequence_length ({self.sequence_length})"
            )
        return self

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        weights = [source.weight for source in self.sources]
        if any(w is None for w in weights) and any(w is not None for w in weights):
            raise ValueError(
                f"sources.{weights.index(None)}: has no `weight`, and others have; give all "
                "sources one, or none"
            )
        if self.weighted and not any(weights):
            raise ValueError("sources: every `weight` is 0; raise one")
        if not self.weighted and any(source.epochs is not None for source in self.sources):
            raise ValueError("sources: `epochs` needs a `weight` for every source")
        if self.weighted and self.group_by_length:
            raise ValueError("`group_by_length` does not go with weights of sources")
        if self.load.shuffle != "global" and self.group_by_length:
            raise ValueError("`group_by_length` decides the order; leave load.shuffle global")
        return self
