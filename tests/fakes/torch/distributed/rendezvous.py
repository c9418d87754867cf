_rendezvous_handlers = {"env": None}
