class TCPStore:
    def __init__(self, *args, **kwargs):
        pass
