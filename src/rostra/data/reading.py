"""Which reader reads which source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from rostra.config.augmenting import AugmentTable
from rostra.config.sources import (
    CsvSource,
    DatasetSource,
    ExampleSource,
    GutenbergSource,
    JsonlSource,
    ParquetSource,
    PythonDocsSource,
    Source,
    SourceSection,
    TextSource,
    TfrecordSource,
    TokensSource,
    WebDatasetSource,
)
from rostra.data.examples import ExampleReader
from rostra.data.formats import TokensReader
from rostra.data.gutenberg import GutenbergReader
from rostra.data.python_docs import PythonDocsReader
from rostra.data.readers.datasets import DatasetReader
from rostra.data.readers.jsonl import JsonlReader
from rostra.data.readers.tables import CsvReader, ParquetReader
from rostra.data.readers.text import TextReader
from rostra.data.readers.tfrecord import TfrecordReader
from rostra.data.readers.webdataset import WebDatasetReader
from rostra.data.sources import Reader

_READERS: dict[type[SourceSection], Callable[[int, Any], Reader]] = {
    TextSource: TextReader,
    GutenbergSource: GutenbergReader,
    JsonlSource: JsonlReader,
    ParquetSource: ParquetReader,
    CsvSource: CsvReader,
    DatasetSource: DatasetReader,
    WebDatasetSource: WebDatasetReader,
    TfrecordSource: TfrecordReader,
    PythonDocsSource: PythonDocsReader,
    TokensSource: TokensReader,
}


def make_reader(
    source: Source, index: int, augment: AugmentTable | None = None
) -> Reader | ExampleReader:
    """The reader of `data.sources[index]`; examples get the variants of `augment`."""
    if reader := _READERS.get(type(source)):
        return reader(index, source)
    return ExampleReader(index, cast(ExampleSource, source), augment or AugmentTable())
