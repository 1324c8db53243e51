"""The config file: its strict schema, and a reader whose errors name file, line and key."""

from rostra.config.reader import config_from_dict, config_to_yaml, read_config
from rostra.config.schema import Config, DataSection, ModelSection, Source

__all__ = [
    "Config",
    "DataSection",
    "ModelSection",
    "Source",
    "config_from_dict",
    "config_to_yaml",
    "read_config",
]
