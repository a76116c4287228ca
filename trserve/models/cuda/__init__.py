"""Models on GPUs: operations, attention and the decoder made of them. Unproven on a device."""
