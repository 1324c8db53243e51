"""The config file: its strict schema, and a reader whose errors name file, line and key."""

from rostra.config.axolotl_answers import Translation
from rostra.config.data import DataSection
from rostra.config.reader import config_from_dict, config_to_yaml, read_axolotl, read_config
from rostra.config.schema import Config, ModelSection
from rostra.config.sources import Source

__all__ = [
    "Config",
    "DataSection",
    "ModelSection",
    "Source",
    "Translation",
    "config_from_dict",
    "config_to_yaml",
    "read_axolotl",
    "read_config",
]
