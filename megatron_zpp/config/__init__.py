"""Command line to frozen settings: `config.root` is the whole configuration, other files are its parts."""
