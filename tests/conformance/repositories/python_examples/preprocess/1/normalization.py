import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def normalize(image):
    return (image.astype(np.float32) / 255 - MEAN) / DEVIATION
