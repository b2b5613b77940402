"""Backend `pytorch`: TorchScript modules (`model.pt`) and exported programs (`model.pt2`)."""
