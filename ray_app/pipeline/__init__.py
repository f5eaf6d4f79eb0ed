"""Joins the stages of the flow; runs in the driver."""
