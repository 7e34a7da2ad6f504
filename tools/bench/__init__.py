"""Parts of the benchmark tools. Layer: tools; not installed, imports ``xds`` only inside the loaders."""
