"""What tasks that bring code of another shape share: a script's loop, a Lightning module, an optimizer of one's own."""
