"""Command line to frozen settings. `config.root` is the whole; each other file is one part of it."""
