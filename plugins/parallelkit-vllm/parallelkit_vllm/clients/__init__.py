"""What controls a vLLM engine for `publisher.attach`: one module for each kind of target."""
