"""Steps on a GPU: static inputs, graphs, and decisions within the step. Unproven on a device."""
