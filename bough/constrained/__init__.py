"""Grammars to token masks: what a request may say next. Importing this loads no back end; `interface` is the seam."""
