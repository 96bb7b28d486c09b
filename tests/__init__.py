"""The tests, one folder per room; a package so that its folders may be named like the rooms."""
