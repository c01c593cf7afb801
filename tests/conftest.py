"""Settings for every test: no network, whatever the machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
