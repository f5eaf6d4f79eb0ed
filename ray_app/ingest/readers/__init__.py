"""One reader per format, each cutting its source into pieces by content; `base` joins them."""
