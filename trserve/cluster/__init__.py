"""Groups of workers on several hosts behind one endpoint; Ray places and restarts them."""
