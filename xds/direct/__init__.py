"""Local files: the backend of ``xds://``. Layer: backends."""
