"""How a person reaches simpletune: the command line, the pages, pictures over HTTP. No other room imports it."""
