"""Backend `openvino`: models in the formats that OpenVINO reads."""
