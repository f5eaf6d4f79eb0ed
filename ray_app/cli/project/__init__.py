"""cli/project"""
