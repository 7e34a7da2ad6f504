"""XDS: storage reads that land straight in GPU memory, behind ordinary fsspec URLs."""

from __future__ import annotations
