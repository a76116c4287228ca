"""The solver process: it watches the steps, and works out the batch thresholds."""
