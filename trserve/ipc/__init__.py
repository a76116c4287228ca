"""How trserve's processes share requests: slab, rings, doorbells, control. Knows no torch."""
