class Lm1b:
    pass
