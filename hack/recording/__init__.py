# SPDX-License-Identifier: Apache-2.0
"""The README's recording of a terminal: what the demo's commands print on a cluster, and the moments when they do.

``cast`` records and reads asciinema's format, ``animation`` draws a cast as an SVG. Nothing is made up: only the
prompts are typed by a program.
"""
