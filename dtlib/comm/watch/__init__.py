"""What makes communication safe and visible: comparing, recording, and saying whom everybody waits for."""
