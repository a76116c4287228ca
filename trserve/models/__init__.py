"""Model definitions and weight loading. ``spec`` and ``aliases`` are free of torch."""
