"""Measuring aids: networks on one machine. Nothing here is needed to train."""
