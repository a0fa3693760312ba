"""How does a person reach simpletune? By the command line, the pages, or HTTP. No other room imports this one."""
