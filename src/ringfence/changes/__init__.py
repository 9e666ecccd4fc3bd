"""What a sandbox changed in an overlay workspace: captured, shown, and written to the host or not at all.

`collecting` turns captured records into `Changes`; `differences` makes the diffs; `places` finds names below the
workspace without following a link; `applying` writes, `journal` survives a crash in the middle of that.
"""
