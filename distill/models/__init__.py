"""How models are called and what their layers give: inputs, attention, heads, generation, sentence vectors."""
