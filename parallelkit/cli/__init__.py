"""The `parallelkit` command. Each subcommand's module is imported when it runs."""
