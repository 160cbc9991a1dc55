"""The demo's model; the demo itself runs on torch."""
