"""Tables and texts as files and the hub hold them."""
