"""The simulator beside reality (``check``), and what it says of the OPPO paper's settings (``paper``)."""
