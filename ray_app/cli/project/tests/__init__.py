"""cli/project/tests"""
