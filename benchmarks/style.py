"""The look of all pictures: matplotlib's settings, and colours."""

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "torch_ros",  # the same figures make the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
OURS, THEIRS, BLUE = "#c44e52", "#8c8c8c", "#4c72b0"
