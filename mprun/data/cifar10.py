class Cifar10:
    pass
