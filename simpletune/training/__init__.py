"""How does one run go from set-up to finish? What the configuration leaves open is resolved, data and model are loaded,
and the trainer takes the steps, saves, validates and answers between them."""
