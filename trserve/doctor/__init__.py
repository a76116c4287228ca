"""What would keep a server from starting or serving well here, found before it is started."""
