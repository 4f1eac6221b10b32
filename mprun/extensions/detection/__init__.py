"""Detection: images with boxes, SSD, Faster R-CNN, average precision."""
