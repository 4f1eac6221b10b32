class ImageFolder:
    pass
