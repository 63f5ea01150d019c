"""The demo: real digits, a small ResNet, and one page at the end."""
