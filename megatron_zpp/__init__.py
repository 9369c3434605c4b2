"""GPT pretraining with a built-in ZeRO++ layer. README.md is the map."""

__version__ = "0.1.0"
