"""The bank of retrained models that LDS is measured with."""

from unde.evaluate.bank.bank import Bank

__all__ = ["Bank"]
