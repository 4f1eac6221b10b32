class Text:
    pass
