"""Engines: what moves bytes. Layer: above native, below the backends."""
