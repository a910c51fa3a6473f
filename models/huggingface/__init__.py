"""Checkpoints of the Hugging Face format, by one table of families."""

from models.huggingface.checkpoint import load, save

__all__ = ["load", "save"]
